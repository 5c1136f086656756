"""How a command ended."""


def failed(result, code, *words):
    """One line on stderr, beginning as all our errors do."""
    assert result[0] == code, result
    assert result[1] == ""
    assert result[2].startswith("kt: error: ") and result[2].count("\n") == 1, result
    for word in words:
        assert str(word).lower() in result[2].lower()
