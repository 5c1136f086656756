"""Checks how a command ended."""


def failed(result, code, *words):
    """Checks for one line on stderr that begins like all our errors."""
    assert result[0] == code, result
    assert result[1] == ""
    assert result[2].startswith("kt: error: ") and result[2].count("\n") == 1, result
    for word in words:
        assert str(word).lower() in result[2].lower()
