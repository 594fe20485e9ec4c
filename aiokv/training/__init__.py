"""What `aiokv.Trainer` is made of, and the rules of synchronisation that live on the worker's side."""
