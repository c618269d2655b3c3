"""What `finetune_long_context.py` needs around its loop: options, data, model, progress, report."""
