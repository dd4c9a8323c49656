"""The families of API paths: what a request means and how its answer is written. Pure; ids and times are arguments."""
