"""Makes a servable folder of one of these shapes, with a tokenizer for its whole vocabulary.

    python bench/shapes/servable.py deepseek-v2-lite DIR
    python -m mla_router.launch_server --model-path DIR --load-format dummy

With a smaller tokenizer the figures would be too good: tokens without text make no events for server and client.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

SHAPES = Path(__file__).resolve().parent
sys.path.insert(0, str(SHAPES.parent))
from shapes.tokenizer import write_tokenizer

from mla_router.worker.config import SMALL_MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shapes = sorted(path.parent.name for path in SHAPES.glob("*/config.json"))
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((SHAPES / args.shape / "config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    (args.folder / "config.json").write_text(json.dumps(config, indent=2))
    shutil.copy(SMALL_MODEL / "chat_template.jinja", args.folder)
    print(f"training a tokenizer of {config['vocab_size']} tokens: a minute", flush=True)
    write_tokenizer(args.folder, config["vocab_size"], ("<｜User｜>", "<｜Assistant｜>"))


if __name__ == "__main__":
    main()
