# Imports the modules that the program will import, waits for its rank, and becomes the program.
# sys.argv: the descriptor of the order, the modules with commas between, "-m" or "-", the command
# line of the program. The order is a line of JSON: the environment of the rank. Without an order,
# the trainer has ended.
import importlib, json, os, sys


def _standby():
    order, modules, kind, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.getcwd() if kind == "-m" else os.path.dirname(os.path.realpath(argv[0]))
    path = os.path.abspath(argv[0])  # as an interpreter of its own has it; a module may change the directory
    for name in modules.split(","):
        try:
            importlib.import_module(name)
        except Exception as e:
            print(f"--preload: module {name} is not imported in advance: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
    text = b""
    while not text.endswith(b"\n"):
        piece = os.read(order, 1 << 16)
        if not piece:
            os._exit(0)
        text += piece
    os.close(order)
    os.environ.update(json.loads(text))
    sys.argv[:] = argv
    return kind, path


_kind, _path = _standby()
if _kind == "-m":
    import runpy

    runpy._run_module_as_main(sys.argv[0])
else:
    __file__, __cached__ = _path, None
    for _name in set(globals()) - {"__file__", "__cached__", "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__", "__builtins__"}:
        del globals()[_name]
    del _name
    exec(compile(__import__("io").open_code(__file__).read(), __file__, "exec"), globals())
