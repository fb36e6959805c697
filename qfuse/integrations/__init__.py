"""Entry points in the form that programs which load models by mlx-lm call them."""
