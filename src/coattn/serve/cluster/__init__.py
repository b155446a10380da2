"""Several machines: the app of `coattn serve` as a deployment of Ray Serve.

    app        the application that `serve deploy` builds      options   what it is told
    front      takes HTTP, reads bodies                        server    one replica: an engine and the app
    relay      to a replica, to another one if that dies       router    Ray's hook: which replica
    affinity   what a body says of where its KV may lie        rank      replicas in order of preference

Only `app`, `front`, `router` and `server` know Ray.
"""
