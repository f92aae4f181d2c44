"""From a function or module to one `torch.fx` graph of global ops, forward and backward."""
