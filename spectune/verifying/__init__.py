"""The losslessness audit: whether speculative decoding gives what plain decoding gives."""
