import torch

import colocate

recording = colocate.load_recording("runs/broken")
score, learn = recording["reward"]["score"][0], recording["actor"]["learn"][0]
rows = score.inputs()
rewards = torch.tensor(
    [float("abcd"[row] == word[0]) for word, row in zip(rows["words"], rows["answers"], strict=True)]
)
print("rewards as the script's:", f"{(rewards == score.joined()).float().mean():.2f}")
rows = learn.inputs()
log_probs = torch.full((len(rows["answers"]),), 0.25).log()  # of a model that has learned nothing
loss = -(log_probs * (rows["rewards"] - rows["rewards"].mean())).mean()
print("loss as the script's:", torch.allclose(loss, torch.tensor(learn.joined()), atol=1e-6))
