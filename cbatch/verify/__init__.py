"""Models tried: whether answers in company are those alone, what is shared, what is exact."""
