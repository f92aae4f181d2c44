"""What the site needs beside Sphinx and MyST; docs/conf.py uses it."""
