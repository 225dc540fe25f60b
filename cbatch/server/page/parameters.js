// Options of a request that are numbers, with their ranges; a test compares these with cbatch.RunOptions.
// "slider" is the part of the range that is used most.

export const PARAMETERS = [
  {"name": "temperature", "min": 0, "max": 10000, "step": "any", "slider": [0, 2, 0.05], "help": "0 takes the likeliest token"},
  {"name": "top_p", "min": 0, "max": 1, "step": "any", "slider": [0, 1, 0.01], "help": "the smallest set of tokens with this probability; 1 keeps all"},
  {"name": "min_p", "min": 0, "max": 1, "step": "any", "slider": [0, 1, 0.01], "help": "drops tokens below this share of the likeliest one; 0 keeps all"},
  {"name": "top_k", "min": 0, "max": 2147483647, "step": 1, "help": "the k likeliest tokens; 0 keeps all"},
  {"name": "max_tokens", "min": 1, "max": 2147483647, "step": 1, "unset": "no cap", "help": "most tokens of an answer, which ends with the window at last"},
  {"name": "seed", "min": 0, "max": 9007199254740991, "step": 1, "unset": "drawn", "help": "the same seed gives the same answer"}
];

export const MORE_PARAMETERS = [
  {"name": "repeat_penalty", "min": 0.01, "max": 100, "step": "any", "help": "1 changes nothing"},
  {"name": "repeat_last_n", "min": 0, "max": 1048576, "step": 1, "help": "tokens that the penalties look back over"},
  {"name": "presence_penalty", "min": -100, "max": 100, "step": "any", "help": "off the logit of each earlier token"},
  {"name": "frequency_penalty", "min": -100, "max": 100, "step": "any", "help": "off the logit for each earlier occurrence"},
  {"name": "typical_p", "min": 0, "max": 1, "step": "any", "help": "1 keeps all"},
  {"name": "top_n_sigma", "min": -1, "max": 1000, "step": "any", "help": "0 and below keep all"},
  {"name": "xtc_probability", "min": 0, "max": 1, "step": "any", "help": "how often XTC drops the likeliest tokens"},
  {"name": "xtc_threshold", "min": 0, "max": 1, "step": "any", "help": "the probability from which XTC drops"},
  {"name": "dry_multiplier", "min": 0, "max": 100, "step": "any", "help": "DRY against repetitions; 0 is off"},
  {"name": "dry_base", "min": 0, "max": 100, "step": "any", "help": "below 1 turns DRY off"},
  {"name": "dry_allowed_length", "min": 0, "max": 2147483647, "step": 1, "help": "shorter repetitions are free"},
  {"name": "dry_penalty_last_n", "min": 0, "max": 1048576, "step": 1, "help": "tokens that DRY looks back over"},
  {"name": "timeout_s", "min": 0, "max": 1000000000, "step": "any", "unset": "none", "help": "seconds, the queue included"}
];
