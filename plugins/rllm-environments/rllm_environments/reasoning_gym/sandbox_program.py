"""Program that scores one answer inside a sandbox. Its source is sent there; it needs reasoning-gym only."""

import json
import signal
import sys
import warnings


def main() -> None:
    """Reads a call from standard input; prints when it is ready, and then the score unless the checker raises."""
    call = json.load(sys.stdin)
    sys.path.extend(path for path in call["paths"] if path not in sys.path)
    warnings.simplefilter("ignore")
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(call["environment"], **call["options"], seed=call["seed"], size=call["size"])
    item = dataset[call["index"]]
    print(call["token"], "ready", flush=True)
    signal.setitimer(signal.ITIMER_REAL, call["check_seconds"])  # ends this program
    print(call["token"], "score", float(dataset.score_answer(call["text"], item)), flush=True)


if __name__ == "__main__":
    main()
