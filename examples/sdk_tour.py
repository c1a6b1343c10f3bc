# %% [markdown]
# # A tour of the Python SDK
#
# Text from a running cluster, one of its expert layers called by itself, and a transformers model whose experts live in
# the cluster. Run it cell by cell in an editor that knows `# %%`, or whole: `python examples/sdk_tour.py`. By itself it
# starts a small cluster on this machine; with TOUR_CLUSTER in the environment it uses the one of that name, and with
# TOUR_URL the HTTP server there too.

# %%
import os

import ray
import torch

import ray_moe
from ray_moe import cluster as clusters
from ray_moe.config import ClusterConfig
from ray_moe.errors import IllegalTransitionError, RequestError
from ray_moe.models import tiny_moe_path

name, url = os.environ.get("TOUR_CLUSTER"), os.environ.get("TOUR_URL")
started = None
if name is None:
    ray.init(num_cpus=4, namespace="ray_moe", include_dashboard=False, log_to_driver=False)
    started = clusters.start(ClusterConfig(name="tour", model=str(tiny_moe_path()), peers=2))
    name = "tour"

# %% [markdown]
# ## Text
# `connect` finds the Ray cluster that this process is connected to, or the one that runs on this machine.

# %%
client = ray_moe.connect(cluster=name)
for piece in client.stream_text("To be, or not to be", max_tokens=40, temperature=0.0):
    print(piece, end="", flush=True)
print()

generation = client.generate("Who goes there?", max_tokens=16, seed=7)
print(generation.finish_reason, "under generations", generation.generations, repr(client.decode(generation.token_ids)))

# %% [markdown]
# ## Experts as a service
# Your model has a router of its own: it brings hidden rows, the experts it chose, and their weights. Calls of all
# callers that wait for the same layer are computed in one step, beside the cluster's own requests.

# %%
layer = client.experts(client.moe_layers[0])
facts = client.facts
hidden = torch.randn(5, facts.hidden_size)
scores = torch.randn(5, facts.num_experts).softmax(dim=-1)
weights, ids = scores.topk(facts.top_k)
print("layer", layer.layer, "gives", tuple(layer.forward(hidden, ids, weights).shape))

# %% [markdown]
# Or begin, do other work while the cluster computes, and combine: once.

# %%
call = layer.dispatch(hidden, ids, weights)
shared = hidden @ torch.randn(facts.hidden_size, facts.hidden_size)  # a shared expert, say
output = call.combine() + shared
try:
    call.combine()
except IllegalTransitionError as error:
    print("a second combine:", error)
try:
    layer.forward(hidden.double(), ids, weights)
except RequestError as error:
    print("another dtype:", error)

# %% [markdown]
# ## Your transformers model, the cluster's experts
# `load_trunk` reads everything but the routed experts; `AutoModelForCausalLM.from_pretrained(path,
# experts_implementation="ray_moe")` builds the same model after `register`.

# %%
ray_moe.register(client)
model = ray_moe.load_trunk(tiny_moe_path())
held = sum(parameter.numel() for parameter in model.parameters())
prompt = torch.tensor([list(client.tokenizer.encode("To be, or not to be"))])
tokens = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
print(f"{held:,} parameters here:", repr(client.decode(tokens.tolist())))
ray_moe.unregister()

# %% [markdown]
# ## The same over HTTP
# No Ray, and without layers no torch either: retries never run a request twice, and errors have types.

# %%
if url is not None:
    with ray_moe.MoEClient(url) as http:
        print(http.complete("To be, or not to be", max_tokens=12, temperature=0).text)
        for chunk in http.stream_chat([{"role": "user", "content": "Who goes there?"}], max_tokens=12):
            print(chunk.text, end="", flush=True)
        print()
        same = http.experts(layer.layer).forward(hidden, ids, weights)
        torch.testing.assert_close(same, layer.forward(hidden, ids, weights))

# %%
client.close()
if started is not None:
    started.stop()
    ray.shutdown()
