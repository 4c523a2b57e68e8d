package main

import (
	"errors"
	"log/slog"
	"time"
)

// Config is everything a person can set, validated. See SPEC section 3 for the keys.
type Config struct {
	Dir     string // state folder
	Channel string // "telegram" or "local"

	Timeout           time.Duration // timeout_seconds: an ordinary question's life
	PermissionTimeout time.Duration // permission_timeout_seconds: a permission question's life
	Stuck             time.Duration // stuck_timeout_seconds
	EchoWindow        time.Duration // echo_suppression_ms
	Away              time.Duration // away_after_seconds
	Threshold         float64       // detection_threshold
	BufferBytes       int           // buffer_size_bytes
	FreeText          bool          // free_text_enabled
	NotifyIdle        bool          // notify_idle

	Token   string  // telegram.bot_token
	ChatID  int64   // telegram.chat_id
	Users   []int64 // telegram.allowed_users
	APIBase string  // telegram.api_base

	Stream    bool          // stream.enabled
	MaxChars  int           // stream.max_chars
	Flush     time.Duration // stream.flush_ms
	StripANSI bool          // stream.strip_ansi

	SafeDefaults  map[PromptType]string // safe_defaults.*, per type
	RetentionDays int
	LogLevel      string

	origin map[string]string // key → "flag", "environment NAME", "file" or "default"
}

// loadConfig reads dir/config.toml (absent: all defaults), then the environment (getenv). flags are
// "key=value" settings from the command line, which win. Errors name file, line and remedy.
func loadConfig(dir string, getenv func(string) string, flags map[string]string) (*Config, error) {
	return nil, errors.New("stub")
}

// stateDir is where everything is kept: ATLASBRIDGE_HOME, else STORAGE_PATH, else ~/.atlasbridge.
func stateDir(getenv func(string) string) (string, error) { return "", errors.New("stub") }

// secureDir makes dir (0700) when it is missing, and refuses one that is not the user's own, is a
// symbolic link, or that group or others can enter.
func secureDir(dir string) error { return errors.New("stub") }

// openLog is the log file dir/atlasbridge.log (0600): levels, rotation by size, every value through redact.
func openLog(dir, level string) (*slog.Logger, func() error, error) {
	return nil, nil, errors.New("stub")
}
