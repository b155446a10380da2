"""Several machines: the app of `coattn serve` as a deployment of Ray Serve.

    app        the application that `serve deploy` builds      options   the `args` of the file
    relay      a request to a replica; if it dies, to another  server    one replica: an engine and the app
    affinity   which replica has a request's KV

Only `app` knows Ray.
"""
