package main

import (
	"debug/buildinfo"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
)

// Programs that are built with skewTag read the rate of their node's clock from envRate.
// internal/nodes/clock_testbed.go has the reason why that equals a skewed clock.
const (
	skewTag = "testbed"
	envRate = "CKPTSTORE_TESTBED_CLOCK_RATE"
)

// canSkew returns an error if the trainer in a directory does not read envRate: the clocks
// would be right, and nothing proved.
func canSkew(bin string) error {
	path := filepath.Join(bin, "trainer")
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return fmt.Errorf("skew the clocks: %w", err)
	}
	for _, s := range info.Settings {
		if s.Key == "-tags" && slices.Contains(strings.Split(s.Value, ","), skewTag) {
			return nil
		}
	}
	return fmt.Errorf("skew the clocks: %s is built without the tag %s; build it with it, or give --skew 0", path, skewTag)
}

// drawRates draws the rates of the nodes' clocks: each is right, or slow or fast by so many
// percent, and they are not all the same.
func drawRates(seed uint64, percent int, nodes []string) map[string]float64 {
	random := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // for tests
	rates := map[string]float64{}
	for {
		for _, name := range nodes {
			rates[name] = 1 + float64((random.IntN(3)-1)*percent)/100
		}
		same := func(name string) bool { return rates[name] == rates[nodes[0]] }
		if percent == 0 || len(nodes) < 2 || slices.ContainsFunc(nodes, func(name string) bool { return !same(name) }) {
			return rates
		}
	}
}
