"""What the verbs of the command do, once it is clear which one was meant: each says its result to a person, or as one JSON document."""
