# docker buildx bake                       CPU images, tuneloop/{base,trainer,rollout,gateway}:dev
# ACCELERATOR=gpu REGISTRY=registry.example/tuneloop TAG=1.2 docker buildx bake --push
variable "REGISTRY" { default = "tuneloop" }
variable "TAG" { default = "dev" }
variable "ACCELERATOR" { default = "cpu" }
variable "VERSION" { default = "0" }
variable "REVISION" { default = "unknown" }
variable "PYTHON" { default = "python:3.11-slim-bookworm" } # pin it by digest for a release

group "default" { targets = ["image"] }

target "image" {
  name       = name
  matrix     = { name = ["base", "trainer", "rollout", "gateway"] }
  context    = "."
  dockerfile = "images/${name}/Dockerfile"
  tags       = ["${REGISTRY}/${name}:${TAG}"]
  platforms  = ["linux/amd64"]
  args = {
    PYTHON      = PYTHON
    ACCELERATOR = ACCELERATOR
    VERSION     = VERSION
    REVISION    = REVISION
  }
  attest = ["type=provenance,mode=max", "type=sbom"]
}

target "ray" { # for RayJobs; docker buildx bake ray
  context    = "."
  contexts   = { trainer = "target:trainer" }
  dockerfile = "images/ray/Dockerfile"
  tags       = ["${REGISTRY}/ray:${TAG}"]
  args       = { PYTHON = PYTHON, TRAINER = "trainer", VERSION = VERSION, REVISION = REVISION }
}
