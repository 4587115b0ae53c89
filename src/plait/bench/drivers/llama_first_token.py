"""What a user of llama-cpp-python writes to see a first token: the peer of a cold `plait generate`.

python llama_first_token.py FILE THREADS PROMPT
"""

from __future__ import annotations

import sys

from llama_cpp import Llama  # type: ignore[import-not-found]

path, threads, prompt = sys.argv[1:]
llm = Llama(path, n_ctx=512, n_threads=int(threads), n_threads_batch=int(threads), flash_attn=True, verbose=False)
for piece in llm.create_completion(prompt, max_tokens=1, temperature=0, stream=True):
    sys.stdout.write(piece["choices"][0]["text"])
    sys.stdout.flush()
