"""A file to complete: the cursor of `make run` stands behind `self.` in the last line."""

import unittest


class Reader:
    def __init__(self, text):
        self.text = text
        self.position = 0

    def read(self):
        self.position += 1
        return self.text[self.position - 1]


class ReaderTest(unittest.TestCase):
    def test_read(self):
        reader = Reader("ab")
        self.assertEqual(reader.read(), "a")
        self.assertEqual(reader.read(), "b")
