"""Several machines: the app of `coattn serve` as a deployment of Ray Serve.

    app        the application that `serve deploy` builds      options   the `args` of the file
    front      takes HTTP, reads bodies                        server    one replica: an engine and the app
    relay      to a replica; if it dies, to another one          router    Ray's hook: which replica
    affinity   keys of a body: where its KV may lie            rank      replicas in order of preference

Only `app`, `front`, `router` and `server` know Ray.
"""
