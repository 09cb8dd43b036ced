"""Training: whole sequences through the reference operations, which have derivatives."""
