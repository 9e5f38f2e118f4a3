package projections

// Number is a metric's value as a number: "NaN", "Infinity" and "-Infinity"
// are numbers too. ok is false if it is none.
func Number(v any) (value float64, ok bool) { return asNumber(v) }
