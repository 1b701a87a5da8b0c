"""fedlit as a job of NVIDIA FLARE (the extra ``nvflare``): what its server and its sites run."""
