"""Models over several processes: with DDP and FSDP2 beside data-parallel ranks, compiled, and stored for another number of ranks."""

import copy
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from longspan.torch import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer, distributed, models
from longspan.torch.distributed import context_parallel, mean_loss, one_process, stretch
from test_torch_context_parallel import on
from torch import nn

BATCH, LENGTH, WIDTH = 4, 21, 16
ATTENTIONS = {"kernelized": {}, "shaw": {"radius": 3}, "fourier": {}, "aft-local": {"length": LENGTH, "window": 3}, "aft-conv": {}}


def learning(model):
    for parameter in model.parameters():
        if not parameter.any():
            # Some start at 0, where others have no gradient.
            nn.init.normal_(parameter)
    return model


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        make = lambda: TransformerEncoderLayer(  # noqa: E731
            WIDTH, 2, 32, dropout=0.0, batch_first=True, attention=name, **ATTENTIONS[name]
        )
        self.layers = nn.ModuleList([make(), make()])
        learning(self)

    def forward(self, x, weights, is_causal=True):
        for layer in self.layers:
            x = layer(x, is_causal=is_causal)
        return (x * weights).sum()


def data():
    return [torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]


def share(mesh):
    """This rank's stretch of its data-parallel rank's entries."""
    replicas = mesh["data"].size()
    return [t.chunk(replicas)[mesh["data"].get_local_rank()][:, stretch(LENGTH, mesh["sequence"])] for t in data()]


def meshes(world):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "sequence"))


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()


def gradients(rank, world, compiled):
    mesh = meshes(world)
    for name in ["shaw"] if compiled else ATTENTIONS:
        for is_causal in (True, False):
            one = Model(name)
            expected = one(*data(), is_causal) / (BATCH * LENGTH)
            expected.backward()
            replicas = nn.parallel.DistributedDataParallel(context_parallel(Model(name), mesh["sequence"]))
            shards = sharded(context_parallel(Model(name), mesh["sequence"]), mesh)
            for kind, model in (("ddp", replicas), ("fsdp", shards)):
                model = torch.compile(model, backend="aot_eager") if compiled else model
                # The second time on storage that the first one freed.
                for _ in range(2):
                    model.zero_grad()
                    own = share(mesh)
                    loss = mean_loss(model(*own, is_causal), own[0].shape[0] * own[0].shape[1], mesh)
                    loss.backward()
                torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
                for (parameter, got), wanted in zip(model.named_parameters(), one.parameters()):
                    error = (full(got.grad) - wanted.grad).abs().max() / wanted.grad.abs().max()
                    assert wanted.grad.abs().max() > 0 and error < 2e-5, (name, is_causal, kind, parameter, error)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_by_two_processes_have_the_gradients_of_one(compiled):
    on(4, gradients, compiled)


def over_all(world):
    """A model over all ranks, and how they stand."""
    mesh = meshes(world)
    return sharded(context_parallel(Model("shaw"), mesh["sequence"]), mesh), mesh


def restored(model, folder):
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    return model


def store(rank, world, folder):
    model, mesh = over_all(world)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(*share(mesh)).backward()
    optimizer.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loss = mean_loss(model(*share(mesh)), 1, mesh)
    if rank == 0:
        torch.save(loss.detach(), f"{folder}/loss")


def load(rank, world, folder):
    model, mesh = over_all(world)
    loss = mean_loss(restored(model, folder)(*share(mesh)), 2, mesh)
    torch.testing.assert_close(loss.detach(), torch.load(f"{folder}/loss"), rtol=1e-5, atol=1e-5)


def test_checkpoints_load_on_another_number_of_ranks(tmp_path):
    on(4, store, str(tmp_path))
    on(2, load, str(tmp_path))
    loss = restored(Model("shaw"), str(tmp_path))(*data()) / 4
    torch.testing.assert_close(loss.detach(), torch.load(tmp_path / "loss"), rtol=1e-5, atol=1e-5)


SETTINGS = {"attention": "kernelized", "d_model": 8, "heads": 2, "layers": 1, "d_ff": 16}
PAIRS = {"encoder_layers": 1, "decoder_layers": 1}


def modules(rank, world):
    mesh = meshes(world)
    group = mesh["sequence"].get_group()
    drawn = models.LanguageModel({**SETTINGS, "synthetic": "copying"}, 9)
    make = lambda attention, **o: TransformerEncoderLayer(8, 2, 16, batch_first=True, attention=attention, **o)  # noqa: E731
    for message, model, over in (
        ("context_parallel: self_attn.attention: expected attention whose stretches add up, got toeplitz", make("toeplitz"), group),
        ("got softmax: its weights need every key", make("softmax"), group),
        ("got aft-full", make("aft-full"), group),
        ("got delta: states that decay or correct themselves are not exchanged", make("gated-delta", convolution=4), group),
        ("0: expected attention of longspan, got torch's", nn.Sequential(nn.MultiheadAttention(8, 2)), group),
        ("expected a mechanism of longspan, got Identity", make(lambda *_, **__: nn.Identity()), group),
        ("expected one with attention of longspan in it, got Linear", nn.Linear(2, 2), group),
        ("Classifier: expected a model that acts on each token alone", models.Classifier(SETTINGS, 9, 2), group),
        ("got one that makes one row of a whole sequence", models.SeriesModel(SETTINGS, 1, 2), group),
        ("got one that counts the tokens of whole sources", models.Seq2Seq({**SETTINGS, **PAIRS}, 9, 9), group),
        ("model: expected a model that acts on each token alone", nn.ModuleDict({"model": drawn}), group),
        ("got one that is over several already", context_parallel(make("shaw"), group), group),
        ('expected one dimension, such as mesh["sequence"], got 2', make("shaw"), mesh),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            context_parallel(model, over)
    x = torch.ones(1, 3, 8)
    layer = context_parallel(make("shaw"), group)
    for options in {"output_final_state": True}, {"initial_state": make("shaw")(x, is_causal=True, output_final_state=True)[1]}:
        with pytest.raises(ValueError, match="_state: expected"):
            layer(x, is_causal=True, **options)
    with pytest.raises(ValueError, match="total: expected one number"):
        mean_loss(x, 1, mesh)
    assert mean_loss(x.sum(), 0, mesh) == 0
    # A copy is over the same ranks, steps are of one process, and names stay.
    assert copy.deepcopy(layer).state_dict().keys() == make("shaw").state_dict().keys()
    layer.step(x[:, 0])
    torch.manual_seed(0)
    decoder = TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, attention="shaw")
    memory, target = (torch.randn(1, n, 8, generator=torch.Generator().manual_seed(n)) for n in (7, 12))
    whole = decoder(target, memory, tgt_is_causal=True)[:, stretch(12, group)]
    own = context_parallel(decoder, group)(target[:, stretch(12, group)], memory[:, stretch(7, group)], tgt_is_causal=True)
    torch.testing.assert_close(own, whole)
    attention = context_parallel(MultiheadAttention(8, 2, attention="fourier"), mesh["sequence"])
    assert attention(x, x, x)[0].shape == x.shape


def test_modules():
    on(2, modules)


def language_model(rank, world):
    from longspan.transformers import LongspanConfig, LongspanForCausalLM

    mesh = meshes(world)["sequence"]
    torch.manual_seed(0)
    one = LongspanForCausalLM(LongspanConfig(d_model=16, heads=2, layers=1, d_ff=32, attention="shaw", dropout=0.0))
    ids = torch.randint(4, 30, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = one(ids, labels=ids).loss
    here, cut = stretch(LENGTH, mesh), context_parallel(copy.deepcopy(one), mesh)
    with pytest.raises(ValueError, match="labels: expected None over several processes, got some; shift"):
        cut(ids[:, here], labels=ids[:, here])
    # As the page has it.
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)[:, here]
    total = nn.functional.cross_entropy(cut(ids[:, here]).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(mean_loss(total, int((labels >= 0).sum()), mesh), expected)
    if rank == 0:
        # The others know nothing of it.
        with one_process(cut):
            torch.testing.assert_close(cut(ids, labels=ids).loss, expected)
            assert torch.equal(cut.generate(ids, max_new_tokens=5), one.generate(ids, max_new_tokens=5))
            torch.save(cut, stored := io.BytesIO())
        with pytest.raises(ValueError, match="expected one that is over several processes"), one_process(one):
            pass
        stored.seek(0)
        assert torch.equal(torch.load(stored, weights_only=False)(ids).logits, one(ids).logits)
    with pytest.raises(ValueError, match="labels: expected None over several processes"):
        cut(ids[:, here], labels=ids[:, here])


def test_labels_are_shifted_before_a_text_is_cut_and_one_process_generates():
    pytest.importorskip("transformers")
    on(2, language_model)


def halves(rank, world):
    q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
    (q if rank == 0 else k).requires_grad_()
    with pytest.raises(ValueError, match="gradients: expected the same on every rank"):
        distributed.kernelized_attention(q, k, v, is_causal=True, group=torch.distributed.group.WORLD)


def test_ranks_that_would_wait_for_each_other_in_the_backward_are_refused():
    on(2, halves)


EXAMPLE = Path(__file__).parents[1] / "examples" / "one_text.py"


def losses(*command):
    """What a run of the example prints, after the steps."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr
    return torch.tensor([float(line.split()[-1]) for line in out.stdout.splitlines()])


ON = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
OURS = (EXAMPLE, EXAMPLE, "--tokens", "501", "--width", "16")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The losses of two steps on four processes, and a folder with the checkpoint after them."""
    folder = tmp_path_factory.mktemp("begun")
    return losses(*ON, "4", *OURS, "--steps", "2", "--checkpoints", folder), folder


def test_the_example_learns_alike_on_any_number_of_processes(begun, tmp_path):
    alone = losses(*OURS, "--steps", "4")
    assert len(alone) == 4 and alone[-1] < alone[0]
    shutil.copytree(begun[1], tmp_path, dirs_exist_ok=True)
    resumed = losses(*ON, "2", *OURS, "--steps", "2", "--checkpoints", tmp_path)
    torch.testing.assert_close(torch.cat([begun[0], resumed]), alone, rtol=0, atol=2e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("fault", ["kill", "interrupt"])
def test_a_fault_ends_all_processes_and_the_last_checkpoint_goes_on(begun, tmp_path, fault):
    shutil.copytree(begun[1], tmp_path, dirs_exist_ok=True)
    ours = (*ON, "2", *OURS, "--checkpoints", tmp_path)
    command = [sys.executable, *map(str, ours), "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [int(child) for child in children if "one_text" in Path(f"/proc/{child}/cmdline").read_text()]
        assert len(workers) == 2
        started = time.monotonic()
        if fault == "kill":
            os.kill(workers[1], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert time.monotonic() - started < 30 and process.returncode != 0
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert fault == "interrupt" or re.search(r"rank\s*: 1 ", said), said
    assert len(losses(*ours, "--steps", "1")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
