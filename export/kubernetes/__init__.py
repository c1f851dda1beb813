"""Kubernetes manifests of a published bundle, as a kustomize base.

::

    bundle ─► fleet        the models to deploy: versions, bytes, replicas
              names        the names of their objects
              addresses    how a router finds its hosts, and the certificates
              containers   the containers and volumes of a pod
              workloads    the objects of each model
              base         the files
"""
