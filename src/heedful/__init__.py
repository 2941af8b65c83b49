"""heedful: train language models from human feedback.

Demonstrations → SFT → rankings → reward model → PPO → evaluation → report, from one laptop upward.

The rooms, in import order (a room imports only from rooms above it):

    errors      exceptions
    records     nouns that are saved (plain text and numbers)
    batches     nouns that are not saved (tensors)
    config      what a run is
    runs        the run folder: layout, metrics, writer, reader
    objectives  the mathematics, pure tensor functions
    data        text becomes tokens
    models      who plays each part
    rollout     the policy speaks, rewards are read
    control     knobs that move
    plan        will it fit: memory and time by arithmetic
    evaluate    is it better: accuracy, gold score, win rate
    annotate    people rank answers: web app, tables, queue, quality control
    train       the loops: SFT, reward model, PPO
    audit       what a reward model likes that it should not
    report      tell people: one HTML file
    pipeline    every stage in order, resumable
    cli         the command line
"""

__version__ = "0.1.0"
