"""What all commands share: flags, tables, progress lines, pages, and files that are written whole or not at all."""
