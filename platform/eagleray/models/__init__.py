"""Networks: backbones behind one interface, heads, momentum copies, queues and memory banks.

A recipe's backbone section and tensors of images go in; modules and features come out.

May import: base, config, views."""
