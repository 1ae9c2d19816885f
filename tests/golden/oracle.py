"""What transformers says of a model with real text, in the form the tests read."""

import json
import pathlib

import torch


@torch.no_grad()
def continue_greedily(model, token_ids: list, num_tokens: int) -> list:
    """The tokens greedy decoding appends; an end of sequence does not end it."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=num_tokens,
    )
    return output[0, len(token_ids) :].tolist()


@torch.no_grad()
def describe(model, key: str, text: str, token_ids: list, num_tokens: int) -> dict:
    output = continue_greedily(model, token_ids, num_tokens)
    # One pass over everything, without a cache, is what the figures are taken from.
    logits = model(torch.tensor([token_ids + output]), use_cache=False).logits[0]
    predicting = logits[len(token_ids) - 1 : -1]
    best = predicting.topk(2).values
    gaps = best[:, 0] - best[:, 1]
    for position, (row, gap) in enumerate(zip(predicting, gaps)):
        assert int(row.argmax()) == output[position] or gap < 1e-3, (key, position)
    log_probs = logits.log_softmax(-1)[:-1].gather(
        1, torch.tensor((token_ids + output)[1:])[:, None]
    )
    return {
        "id": key,
        "text": text,
        "token_ids": token_ids,
        "greedy_token_ids": output,
        "greedy_top2_gaps": [round(float(gap), 4) for gap in gaps],
        # Of each token but the first, given those before it.
        "token_logprobs": [round(float(value), 4) for value in log_probs[:, 0]],
    }


@torch.no_grad()
def window_nats(model, token_ids: list, window: int) -> tuple:
    """Of consecutive windows, each scored from its second token on, as `heddle score` does: the
    nats, and how many tokens were scored."""
    total, count = 0.0, 0
    for begin in range(0, len(token_ids), window):
        row = torch.tensor(token_ids[begin : begin + window])
        logits = model(row[None], use_cache=False).logits[0, :-1]
        total -= float(logits.log_softmax(-1).gather(1, row[1:, None]).double().sum())
        count += len(row) - 1
    return total, count


def perplexity(model, token_ids: list, text_file: str, window: int) -> dict:
    total, count = window_nats(model, token_ids, window)
    value = float(torch.tensor(total / count, dtype=torch.float64).exp())
    return {
        "text_file": text_file,
        "window": window,
        "num_tokens": len(token_ids),
        "value": round(value, 4),
    }


def write_json(path: pathlib.Path, head: dict, list_key: str, rows: list) -> None:
    """Writes the object {**head, list_key: rows} with a line for each row."""
    lines = [json.dumps(row, ensure_ascii=True) for row in rows]
    body = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in head.items())
    text = (
        "{" + body + (",\n" if head else "") + f'"{list_key}": [\n' + ",\n".join(lines) + "\n]}\n"
    )
    path.write_text(text)
