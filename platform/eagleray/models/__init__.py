"""Networks: backbones behind one interface, heads, averaged copies and memories.

A recipe's backbone section and tensors of images go in; modules and features come out.

May import: base, config, storage.
"""
