"""`coattn serve`: an engine behind OpenAI's API.

One thread steps the engine (`engine.py`); one event loop speaks HTTP and never waits for a step.

    lifecycle   starts, drains, stops       app       puts the parts together
    routes/     what is at each path        schema/   what clients send
    call        one request, n answers      answer/   what clients get
    prompt      text and messages to ids    ask       fields to sampling parameters
    gate        keys, hosts, request ids    errors    OpenAI's form
    body, sse   bytes in, events out        guide     answers of a given form
    metrics, status   what can be seen      settings  limits, API keys
    cluster/    several machines, on Ray
"""
