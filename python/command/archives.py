"""Archives of the command for those without Python, from its wheels, and checksums of all that is released: archives.py FOLDER."""

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path


def files_of(wheel):
    """The command and the licences in a wheel, by the names that they have in an archive."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            parts = Path(name).parts
            if parts[0].endswith(".data") and parts[1] == "scripts" or "licenses" in parts:
                yield parts[-1], packed.read(name)


def archive(wheel, folder):
    _, version, *_, platform = wheel.stem.split("-")
    # Of several tags for one platform the first.
    name, files = f"longspan-{version}-{platform.split('.')[0]}", dict(files_of(wheel))
    if not files.keys() & {"longspan", "longspan.exe"}:
        raise SystemExit(f"{wheel}: expected the command in it, got {sorted(files)}")
    if "longspan.exe" in files:
        with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            for file, contents in sorted(files.items()):
                packed.writestr(f"{name}/{file}", contents)
        return
    with tarfile.open(folder / f"{name}.tar.gz", "w:gz") as packed:
        for file, contents in sorted(files.items()):
            entry = tarfile.TarInfo(f"{name}/{file}")
            entry.size, entry.mode = len(contents), 0o755 if file == "longspan" else 0o644
            packed.addfile(entry, io.BytesIO(contents))


def main(folder):
    for wheel in sorted(folder.glob("longspan_cli-*.whl")):
        archive(wheel, folder)
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
