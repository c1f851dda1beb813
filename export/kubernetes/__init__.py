"""Kubernetes manifests of a published bundle, as a kustomize base.

::

    bundle ─► fleet        which models, versions, bytes and replicas
              addresses    what the router's settings have to say
              pods         how each is run ─► workloads, network, monitoring
              base         files
"""
