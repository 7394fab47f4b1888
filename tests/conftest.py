"""Four CPU devices for the tests of sharding; everything else runs on the first of them."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
