import _thread, gc, os, threading, weakref
from dataclasses import dataclass, replace
import numpy as np, pytest
from tests.fixtures.memory import *
from tests.engine.test_driver import threads

def test_interrupt(recipe):
    with recipe.build(microbatch=2) as p: expected = digests(take(p, 6))
    asked, caught = threading.Event(), threading.Event()
    calls=[]
    def fn(doc):
        calls.append(doc)
        if len(calls) > 150 and not caught.is_set():
            asked.wait(30); 
            _thread.interrupt_main()
            caught.wait(30)
        return doc
    with recipe.build(microbatch=2, runner="thread", workers=1, fn=fn, prefetch_batches=1) as p:
        batches = iter(p); found=[]
        asked.set()
        while len(found) < 6:
            try: found.append(next(batches))
            except KeyboardInterrupt: caught.set()
    assert digests(found) == expected

class Slow:
    def __getattr__(self, n): return getattr(PROCESSOR, n)

def test_interrupt2(recipe, monkeypatch):
    with recipe.build(microbatch=2) as p: expected = digests(take(p, 6))
    caught = threading.Event()
    import zephon_mm.processors.siglip as sg
    old = sg.SigLIPProcessor.write
    n=[0]
    def write(self, e, out):
        n[0]+=1
        if n[0]==3:
            import time; time.sleep(.5)
            _thread.interrupt_main(); caught.wait(30)
        old(self, e, out)
    monkeypatch.setattr(sg.SigLIPProcessor, "write", write)
    with recipe.build(microbatch=2, runner="thread", workers=1, prefetch_batches=1) as p:
        batches = iter(p); found=[]
        while len(found) < 6:
            try: found.append(next(batches))
            except KeyboardInterrupt: caught.set()
    assert caught.is_set()
    assert digests(found) == expected

def test_gc_in_driver(recipe):
    dropped, done = threading.Event(), threading.Event()
    me = threading.get_ident()
    def collect(seq):
        if dropped.wait(0) or len(seen)>2:
            dropped.wait(30); gc.collect(); done.set()
        seen.append(1)
        return seq
    seen=[]
    p = Pipeline(recipe.source()).options(runner="inline", canonical_replicas=2, memory_budget_bytes=8<<20, prefetch_batches=50)
    p.interleave(tokenizer=byte_level_bpe(), image_processor=PROCESSOR).pack_flat(max_length=64).map_sequence(collect).batch(microbatch_size=1)
    holder=[p]; holder.append(holder)
    it = iter(p); next(it)
    thread, = [t for t in threading.enumerate() if t.name=="zephon_mm driver"]
    gc.disable()
    try:
        del it, p, holder
        dropped.set()
        assert done.wait(30)
    finally: gc.enable()
    thread.join(30)
    assert not thread.is_alive()
