"""``fedlit certificates``: those of a server and sites, for a trial across organisations."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedlit.cli.loading import load


def certificates(args: list[str]) -> None:
    """Make certificates for a trial."""
    parser = argparse.ArgumentParser(
        "fedlit certificates",
        description="Make a certificate authority, and certificates and keys of a server and sites, for a trial.",
    )
    parser.add_argument("--sites", required=True, help="names of the sites, as in north,south")
    parser.add_argument("--server", required=True, help="host by which sites call the server")
    parser.add_argument("--out", required=True, type=Path, help="folder for the files, made if need be")
    parser.add_argument("--days", type=int, default=365, help="for which they are valid (default: 365)")
    options = parser.parse_args(args)
    sites = [name.strip() for name in options.sites.split(",")]
    make_certificates = load("fedlit.remote.certificates:make_certificates")
    try:
        make_certificates(options.out, options.server, sites, options.days)
    except ValueError as error:
        sys.exit(f"fedlit: {error}")
    authority = options.out / "ca.crt"
    print(f"The server gets  '{options.out / 'server.crt'}', '{options.out / 'server.key'}' and '{authority}'.")
    for name in sites:
        print(f"Site {name} gets  '{options.out / name}.crt', '{options.out / name}.key' and '{authority}'.")
    print(f"Nobody gets '{options.out / 'ca.key'}': who has it can make certificates in any name.")
