"""The commands, the demo and the models of the notebooks: the only code that imports both training and interp."""
