"""A Flower app whose clients never see the weights of the model that they train."""
