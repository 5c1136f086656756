"""The methods of `kt quant`. The command line reads them without importing torch."""

# By their names there.
QUANT_METHODS = {
    "int8": "AMXINT8",
    "int4": "AMXINT4",
    "int4_g32": "INT4_G32",
    "int4_g128": "INT4_G128",
    "moe_int8": "MOE_INT8",
    "moe_int4": "MOE_INT4",
}
