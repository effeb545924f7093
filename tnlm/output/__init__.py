"""Code that all commands share: flags, tables, exit codes, progress, HTML pages, and atomic files."""
