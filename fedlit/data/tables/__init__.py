"""Tables: files that are read and checked, columns that clients agree on, and features that are made of them."""
