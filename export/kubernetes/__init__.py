"""Kubernetes manifests of a published bundle, as a kustomize base.

::

    bundle ─► fleet        the models to deploy: versions, bytes, replicas
              names        the names of their objects
              addresses    how a router finds its hosts
              objects      the objects of each model, by model.yaml.jinja
              base         the files
"""
