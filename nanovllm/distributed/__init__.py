"""What the ranks of a model that is split over devices have in common."""
