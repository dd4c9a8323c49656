"""The forms that clients speak: for each family of paths, what a request means and how its answer is written. All of it
pure; ids and times are arguments."""
