"""The formats of preference, demonstration and prompt data, one small file per family; ``registry`` lists them all."""
