"""Names that a plug-in takes from a vendor's Python binding, read from the plug-in's source."""

import ast


def attributes(source, module):
    """List what a source uses of a module: ``module.name``, and the text of ``call(module, "name")``."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
            found[node.attr] = None
        if isinstance(node, ast.Call) and len(node.args) > 1 and getattr(node.args[0], "id", "") == module:
            name = getattr(node.args[1], "value", None)
            found |= {name: None} if isinstance(name, str) else {}
    return list(found)
