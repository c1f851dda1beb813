"""Malformed and hostile requests for a real server: made by rule, sent raw, judged by an oracle of their own."""
