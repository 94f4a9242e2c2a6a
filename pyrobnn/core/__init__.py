"""The ground floor: arguments checked, random numbers, chains' statistics, names of groups, findings of a fit."""
