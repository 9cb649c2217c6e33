# docker buildx bake                       CPU images, tuneloop/{base,trainer,rollout,gateway}:dev
# ACCELERATOR=gpu REGISTRY=registry.example/tuneloop TAG=1.2 docker buildx bake --push
variable "REGISTRY" { default = "tuneloop" }
variable "TAG" { default = "dev" }
variable "ACCELERATOR" { default = "cpu" }
variable "VERSION" { default = "0" }
variable "REVISION" { default = "unknown" }
variable "PYTHON" { default = "python:3.11-slim-bookworm" } # pin it by digest for a release

group "default" { targets = ["base", "trainer", "rollout", "gateway"] } # the others: docker buildx bake ray torchtune

target "image" {
  name       = name
  matrix     = { name = ["base", "trainer", "rollout", "gateway", "ray", "torchtune"] }
  context    = "."
  dockerfile = "images/Dockerfile"
  tags       = ["${REGISTRY}/${name}:${TAG}"]
  platforms  = ["linux/amd64"]
  args = {
    IMAGE       = name
    PYTHON      = PYTHON
    ACCELERATOR = ACCELERATOR
    VERSION     = VERSION
    REVISION    = REVISION
  }
  attest = ["type=provenance,mode=max", "type=sbom"]
}
