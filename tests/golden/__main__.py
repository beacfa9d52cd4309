"""Write the samples that have no committed bytes yet; those that have are never written again."""

from tests.golden.samples import FOLDER, SAMPLES, as_text

if __name__ == "__main__":
    for name, make in SAMPLES.items():
        path = FOLDER / f"{name}.hex"
        if not path.exists():
            path.write_text(as_text(make()))
            print(f"wrote {path}")
