"""Names that a plug-in takes from a vendor's Python binding, read from the plug-in's source."""

import ast


def attributes(source, module):
    """List the attributes of a module that a source uses: ``module.name``, and the text of ``optional(module, "name")``."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            found[node.attr] = None
        if isinstance(node, ast.Call) and len(node.args) > 1 and getattr(node.args[0], "id", "") == module:
            if isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
                found[node.args[1].value] = None
    return list(found)
