"""Methods, weight formats, and expert weights in memory and in packed directories."""
